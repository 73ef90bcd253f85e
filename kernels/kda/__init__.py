"""Kimi Delta Attention: naive.py is the definition, tile.py the tile form; Triton twins go beside them."""

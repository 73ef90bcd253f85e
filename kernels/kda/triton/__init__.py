"""KDA on a GPU: Triton twins of tile.py and conv/naive.py; launch.py is what a layer calls."""

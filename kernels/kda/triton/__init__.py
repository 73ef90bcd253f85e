"""KDA on a GPU: Triton twins of tile.py and conv/naive.py, not dispatched yet (launch.py says how a layer calls them)."""

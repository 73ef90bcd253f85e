"""KDA on a GPU: Triton twins of tile.py and conv/naive.py. Not dispatched yet: launch.py is what a layer would call."""

"""MLA on a GPU: Triton twins of naive.py. launch.py is what a layer calls, over one plan a step (../plan.py)."""

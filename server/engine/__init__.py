"""The engine: pools, batches, the runner, sampling and capture. Torch lives here; everybody else uses `base.Engine`."""

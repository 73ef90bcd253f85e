"""The trained tiny model: a Hugging Face style folder, its data generator, its training script and its own check."""

"""Text to token ids and back: the published tokenizer and chat forms. None of it changes a bit of a state."""

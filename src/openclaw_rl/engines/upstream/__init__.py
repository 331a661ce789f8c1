"""A model behind somebody's OpenAI-compatible API: it is given messages, and its weights are elsewhere."""

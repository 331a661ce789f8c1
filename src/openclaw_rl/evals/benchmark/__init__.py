"""The benchmark: whether an OpenAI-compatible endpoint learns from being used."""

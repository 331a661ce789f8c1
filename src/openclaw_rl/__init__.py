"""openclaw-rl: an OpenAI-compatible server for a model you own, which learns from being used."""

__version__ = "0.1.0"

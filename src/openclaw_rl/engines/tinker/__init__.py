"""Tinker, in the cloud or self-hosted: sampling and training on machines of others, through the Tinker SDK."""

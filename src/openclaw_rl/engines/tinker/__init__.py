"""Tinker, in the cloud or self-hosted: sampling and training on remote machines, through the Tinker SDK."""

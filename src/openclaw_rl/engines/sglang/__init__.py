"""SGLang as a sampler: its own server process, or servers that run already."""

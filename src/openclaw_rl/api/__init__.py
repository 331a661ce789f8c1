"""The OpenAI-compatible HTTP API: requests in, completions out, streaming, keys and errors."""

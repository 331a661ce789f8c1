"""The OpenAI wire: requests in, completions out, streaming, keys and errors."""

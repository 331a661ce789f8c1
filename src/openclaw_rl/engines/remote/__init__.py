"""Samplers that are servers of other projects, reached over HTTP. What differs between them is a `Dialect`."""

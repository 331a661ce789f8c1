"""The HTTP routes, one module for each topic; each module has a `router`. Handlers get the server from the request."""

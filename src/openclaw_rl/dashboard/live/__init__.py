"""The live page: served by the server itself, and told of every change while it is open."""

"""Views: pure functions from the read model to what templates show. The live page and the report use the same ones."""

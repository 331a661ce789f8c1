"""Between messages and tokens: prompts one way; text, thoughts and tool calls the other."""

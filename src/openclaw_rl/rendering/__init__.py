"""Messages to tokens (prompts), and tokens to messages (text, reasoning and tool calls)."""

"""Questions as engine items: contexts, chats, facts in prompts, stored answers."""

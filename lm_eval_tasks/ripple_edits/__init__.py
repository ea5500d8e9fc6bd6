"""RippleEdits: six kinds of consequences of an edit."""

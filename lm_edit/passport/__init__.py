"""The passport of an edit: does it hold, what did it break, does it last, and what does it give away?"""

"""`make fuzz`: bytes and messages that nobody should send, at a real daemon; it lives, does not grow, and says no."""

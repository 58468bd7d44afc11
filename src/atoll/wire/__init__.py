"""Channels, framing and the payload codec."""

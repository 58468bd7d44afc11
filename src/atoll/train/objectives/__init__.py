"""What is minimised: one module for each ``[objective] kind``, named after it, with its class as ``OBJECTIVE``."""

"""The ``atoll`` command."""

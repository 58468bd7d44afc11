"""What is trained, on what, and how: one TOML file, checked against a schema."""

"""What `check` looks at, one noun a file."""

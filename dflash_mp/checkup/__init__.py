"""What the doctor looks at, one module per kind of thing."""

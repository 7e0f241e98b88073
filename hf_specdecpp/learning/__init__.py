"""What a draft learns from, and how: texts kept from generation, and the draft as it is taught."""

"""Who is attached, and what each attachment is told."""

"""Who is let in, and how much of what all share each owner may take."""

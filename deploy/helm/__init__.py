"""The Helm chart, and the program that writes the schema of its values."""

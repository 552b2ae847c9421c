"""Authentication of callers, and the share of common resources that each owner may use."""

"""Work that was accepted and has not been fetched for good: submitted, persisted, waited for, fetched again."""

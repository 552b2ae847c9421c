"""`fovea plan`: counts what fits on given GPUs before anything is loaded, by the numbers of the services' admission."""

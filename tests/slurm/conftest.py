from helpers.cpu_only import cpu_only  # noqa: F401 - pytest finds it here

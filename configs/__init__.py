"""The command line, the root schemas and the YAML. The one root that is a regular package: Hydra's pkg:// asks for it."""

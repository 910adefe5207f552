"""`python -m glm_mtp_export` is the `glm-mtp` command."""

from glm_mtp_export.cli import main

main()

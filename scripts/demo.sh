#!/usr/bin/env bash
# Sets up and runs the whole way from checkpoint to text on the small trained model that comes with the package.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" export
glm-mtp demo "$@"

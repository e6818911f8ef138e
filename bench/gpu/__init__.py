"""The measurements on a machine with a GPU and without any package registry: `pack` here, `run.sh` there."""

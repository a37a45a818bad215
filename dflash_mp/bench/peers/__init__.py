"""The peers' training steps as benchmark workers; each module runs in that peer's environment."""

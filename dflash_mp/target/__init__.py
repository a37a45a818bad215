"""The frozen target model: loading, and hidden states of the tapped layers."""

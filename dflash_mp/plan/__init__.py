"""What a training needs and how fast it will be, from configurations alone."""

"""What a rank does all day: the target loop and the drafter loop."""

"""What people who move to manyhands from another trainer rely on, measured."""

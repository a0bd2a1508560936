"""What happens inside of one call of the target, followed tensor by tensor."""

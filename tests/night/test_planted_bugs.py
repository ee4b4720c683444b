"""Messages of laws show the shortest sequence of requests: shrinking one takes longer than finding it."""

from tests.path.test_planted_bugs import check_that_a_request_is_small


def test_a_message_shows_the_shortest_sequence_of_requests() -> None:
    check_that_a_request_is_small("items_swapped_after_a_hit")

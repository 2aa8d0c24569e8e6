"""When two conversations are the same one: by id, or by the text that opens them."""

from hyco_export.core.data.conversations import Conversation, Message, content_id, first_turn, identities


def conversation(name, *turns):
    return Conversation(name, tuple(Message(role, text) for role, text in turns))


WHOLE = conversation("whole", ("user", "What is  a\nlist?"), ("assistant", "A sequence."), ("user", "And a set?"))


def test_the_id_is_made_from_roles_and_texts_and_where_they_end():
    assert content_id(WHOLE.messages) == content_id(WHOLE.messages)
    others = [
        (Message("user", "ab"), Message("user", "c")),
        (Message("user", "a"), Message("user", "bc")),
        (Message("user", "abc"),),
        (Message("usera", "bc"),),
    ]
    assert len({content_id(messages) for messages in others}) == 4


def test_a_prompt_alone_is_the_conversation_it_opens():
    known = identities([first_turn(WHOLE)])
    assert WHOLE in known
    assert conversation("elsewhere", ("user", "what is a LIST?"), ("assistant", "Another answer.")) in known
    assert conversation("elsewhere", ("system", "Be brief."), ("user", "What is a list?")) in known
    assert conversation("elsewhere", ("user", "What is a set?")) not in known
    assert conversation("whole", ("user", "Something else.")) in known  # the id alone is enough


def test_without_a_user_turn_all_text_counts():
    known = identities([conversation("a", ("assistant", "x"), ("assistant", "y"))])
    assert conversation("b", ("assistant", "x"), ("assistant", "y")) in known
    assert conversation("b", ("assistant", "x")) not in known


def test_nothing_is_in_an_empty_set():
    assert WHOLE not in identities([])

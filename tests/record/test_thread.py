"""What is replaced for a while is put back as it was, in any order."""


from analyzer.meta.intercept.replacement import replace


def test_a_static_method_that_is_replaced_is_one_meanwhile():
    class Owner:
        @staticmethod
        def of_none(x):
            return x

        def of_self(self, x):
            return self, x

    undo = [replace(Owner, name, lambda original: lambda *args: (*args, original(*args)))
            for name in ("of_none", "of_self") for _ in range(2)]
    owner = Owner()
    assert owner.of_none(3) == Owner.of_none(3) == (3, (3, 3))
    assert owner.of_self(3) == (owner, 3, (owner, 3, (owner, 3)))
    for put_back in undo:
        put_back()
    assert owner.of_none(3) == 3 and owner.of_self(3) == (owner, 3)


def test_replacements_end_in_any_order():
    class Owner:
        value = 1

    class Heir(Owner):
        pass

    first = replace(Heir, "value", lambda v: v + 10)
    second = replace(Heir, "value", lambda v: v * 2)
    third = replace(Heir, "value", lambda v: v + 100)
    assert Heir.value == 122
    second()
    assert Heir.value == 111
    first()
    assert Heir.value == 101
    third()
    assert (Heir.value, "value" in vars(Heir)) == (1, False)

-- The order service's own tables. Nothing here is unique per idempotency key: only the library stands between a double
-- click and a second order.
CREATE SCHEMA demo;
COMMENT ON SCHEMA demo IS 'The order service of cmd/demo: a shop whose every order comes with an idempotency key.';

CREATE TABLE demo.stock (
    sku      text PRIMARY KEY,
    quantity integer NOT NULL,
    CONSTRAINT stock_quantity_check CHECK (quantity >= 0)
);
COMMENT ON TABLE demo.stock IS 'What is left to sell. Never below zero.';

CREATE TABLE demo.orders (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    idempotency_key text NOT NULL,
    customer        text NOT NULL,
    sku             text NOT NULL REFERENCES demo.stock,
    quantity        integer NOT NULL,
    coupon          text,
    status          text NOT NULL DEFAULT 'created',
    paying          text, -- the downstream key of the payment that is on its way: two keys must not pay one order
    charge          text, -- what the payment gateway calls its payment
    created_at      timestamptz NOT NULL DEFAULT statement_timestamp(),
    CONSTRAINT orders_status_check CHECK (status IN ('created', 'paid', 'shipped', 'delivered', 'refunded')),
    CONSTRAINT orders_quantity_check CHECK (quantity > 0)
);
-- Not unique, on purpose: it serves the storm's own check, which looks for keys with more than one order.
CREATE INDEX orders_idempotency_key_idx ON demo.orders (idempotency_key);
CREATE INDEX orders_paying_idx ON demo.orders (paying) WHERE paying IS NOT NULL;
COMMENT ON TABLE demo.orders IS 'Orders that were accepted. idempotency_key is the client''s key, for people; two orders may have the same one as far as this table is concerned.';

CREATE TABLE demo.coupons (
    code     text PRIMARY KEY,
    order_id bigint UNIQUE REFERENCES demo.orders
);
COMMENT ON TABLE demo.coupons IS 'Coupons. Each can be used for one order: order_id is that one, NULL while it is unused.';

INSERT INTO demo.stock (sku, quantity) VALUES ('coffee', 1000), ('tea', 1000), ('unicorn', 0), ('handmade', 1000);
INSERT INTO demo.coupons (code) VALUES ('WELCOME'), ('SUMMER');

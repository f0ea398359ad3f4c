"""JSON schemas as people use them: forms, extraction from documents, arguments of functions."""

from typing import Any

ORDINARY_SCHEMAS: dict[str, Any] = {
    "person": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "maxlen100": {
        "type": "object",
        "properties": {"title": {"type": "string", "maxLength": 100}, "body": {"type": "string", "maxLength": 2000}},
        "required": ["title", "body"],
        "additionalProperties": False,
    },
    "github_issue": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "minLength": 1, "maxLength": 256},
            "body": {"type": "string", "maxLength": 65536},
            "labels": {"type": "array", "items": {"type": "string", "maxLength": 50}, "maxItems": 100},
            "assignees": {
                "type": "array",
                "items": {"type": "string", "pattern": "^[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,38})$"},
                "maxItems": 10,
            },
            "milestone": {"type": ["integer", "null"]},
            "state": {"enum": ["open", "closed"]},
        },
        "required": ["title", "body"],
        "additionalProperties": False,
    },
    "issue_form": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 100},
            "description": {"type": "string", "maxLength": 200},
            "body": {
                "type": "array",
                "minItems": 1,
                "maxItems": 50,
                "items": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {
                                "type": {"const": "markdown"},
                                "attributes": {
                                    "type": "object",
                                    "properties": {"value": {"type": "string"}},
                                    "required": ["value"],
                                    "additionalProperties": False,
                                },
                            },
                            "required": ["type", "attributes"],
                            "additionalProperties": False,
                        },
                        {
                            "type": "object",
                            "properties": {
                                "type": {"const": "input"},
                                "id": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                                "attributes": {
                                    "type": "object",
                                    "properties": {"label": {"type": "string"}, "placeholder": {"type": "string"}},
                                    "required": ["label"],
                                    "additionalProperties": False,
                                },
                                "validations": {
                                    "type": "object",
                                    "properties": {"required": {"type": "boolean"}},
                                    "required": ["required"],
                                    "additionalProperties": False,
                                },
                            },
                            "required": ["type", "attributes"],
                            "additionalProperties": False,
                        },
                        {
                            "type": "object",
                            "properties": {
                                "type": {"const": "dropdown"},
                                "attributes": {
                                    "type": "object",
                                    "properties": {
                                        "label": {"type": "string"},
                                        "options": {
                                            "type": "array",
                                            "items": {"type": "string"},
                                            "minItems": 1,
                                            "maxItems": 30,
                                        },
                                    },
                                    "required": ["label", "options"],
                                    "additionalProperties": False,
                                },
                            },
                            "required": ["type", "attributes"],
                            "additionalProperties": False,
                        },
                    ]
                },
            },
        },
        "required": ["name", "description", "body"],
        "additionalProperties": False,
    },
    "invoice": {
        "type": "object",
        "properties": {
            "invoice_number": {"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]{4,10}$"},
            "issue_date": {"type": "string", "format": "date"},
            "due_date": {"type": "string", "format": "date"},
            "currency": {"enum": ["USD", "EUR", "GBP", "CHF", "JPY"]},
            "vendor": {"$ref": "#/$defs/party"},
            "customer": {"$ref": "#/$defs/party"},
            "items": {
                "type": "array",
                "minItems": 1,
                "maxItems": 200,
                "items": {
                    "type": "object",
                    "properties": {
                        "description": {"type": "string", "maxLength": 300},
                        "quantity": {"type": "number", "exclusiveMinimum": 0},
                        "unit_price": {"type": "number", "minimum": 0},
                        "tax_rate": {"type": "number", "minimum": 0, "maximum": 1},
                    },
                    "required": ["description", "quantity", "unit_price", "tax_rate"],
                    "additionalProperties": False,
                },
            },
            "total": {"type": "number", "minimum": 0},
        },
        "required": ["invoice_number", "issue_date", "due_date", "currency", "vendor", "customer", "items", "total"],
        "additionalProperties": False,
        "$defs": {
            "party": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 120},
                    "vat_id": {"type": ["string", "null"], "maxLength": 20},
                    "address": {
                        "type": "object",
                        "properties": {
                            "street": {"type": "string"},
                            "city": {"type": "string"},
                            "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
                            "country": {"type": "string", "minLength": 2, "maxLength": 2},
                        },
                        "required": ["street", "city", "zip", "country"],
                        "additionalProperties": False,
                    },
                    "email": {"type": "string", "format": "email"},
                },
                "required": ["name", "vat_id", "address", "email"],
                "additionalProperties": False,
            }
        },
    },
    "receipt": {
        "type": "object",
        "properties": {
            "merchant": {"type": "string"},
            "time": {"type": "string", "format": "date-time"},
            "lines": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "sku": {"type": "string", "pattern": "^[A-Z0-9]{8,14}$"},
                        "price": {"type": "number"},
                    },
                    "required": ["sku", "price"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["merchant", "time", "lines"],
        "additionalProperties": False,
    },
    "weather_call": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "search_call": {
        "type": "object",
        "properties": {
            "query": {"type": "string", "minLength": 1, "maxLength": 400},
            "filters": {
                "type": "object",
                "properties": {
                    "after": {"type": "string", "format": "date"},
                    "before": {"type": "string", "format": "date"},
                    "domains": {"type": "array", "items": {"type": "string", "format": "hostname"}, "maxItems": 20},
                },
                "required": [],
                "additionalProperties": False,
            },
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        },
        "required": ["query"],
        "additionalProperties": False,
    },
    "email_call": {
        "type": "object",
        "properties": {
            "to": {"type": "array", "items": {"type": "string", "format": "email"}, "minItems": 1, "maxItems": 50},
            "cc": {"type": "array", "items": {"type": "string", "format": "email"}},
            "subject": {"type": "string", "maxLength": 200},
            "body": {"type": "string"},
            "priority": {"enum": ["low", "normal", "high"]},
        },
        "required": ["to", "subject", "body"],
        "additionalProperties": False,
    },
    "calendar": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "start": {"type": "string", "format": "date-time"},
            "end": {"type": "string", "format": "date-time"},
            "duration": {"type": "string", "format": "duration"},
            "attendees": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "email": {"type": "string", "format": "email"},
                        "status": {"enum": ["accepted", "declined", "tentative"]},
                    },
                    "required": ["email", "status"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["id", "start", "end", "duration", "attendees"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 8},
                },
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "linked_list": {
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"v": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {"head": {"$ref": "#/$defs/n"}},
        "required": ["head"],
        "additionalProperties": False,
    },
    "math_steps": {
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                    "required": ["explanation", "output"],
                    "additionalProperties": False,
                },
            },
            "final_answer": {"type": "string"},
        },
        "required": ["steps", "final_answer"],
        "additionalProperties": False,
    },
    "ui_component": {
        "$defs": {
            "c": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["div", "button", "header", "section", "field", "form"]},
                    "label": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/c"}},
                    "attributes": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
                            "required": ["name", "value"],
                            "additionalProperties": False,
                        },
                    },
                },
                "required": ["type", "label", "children", "attributes"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/c",
    },
    "ner": {
        "type": "object",
        "properties": {
            "entities": {
                "type": "array",
                "maxItems": 64,
                "items": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string", "maxLength": 100},
                        "label": {"enum": ["PER", "ORG", "LOC", "MISC"]},
                        "start": {"type": "integer", "minimum": 0},
                        "end": {"type": "integer", "minimum": 0},
                    },
                    "required": ["text", "label", "start", "end"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["entities"],
        "additionalProperties": False,
    },
    "sentiment": {
        "type": "object",
        "properties": {
            "label": {"enum": ["positive", "negative", "neutral"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["label", "score"],
        "additionalProperties": False,
    },
    "classification150": {
        "type": "object",
        "properties": {
            "label": {
                "enum": [
                    "category_0",
                    "category_1",
                    "category_2",
                    "category_3",
                    "category_4",
                    "category_5",
                    "category_6",
                    "category_7",
                    "category_8",
                    "category_9",
                    "category_10",
                    "category_11",
                    "category_12",
                    "category_13",
                    "category_14",
                    "category_15",
                    "category_16",
                    "category_17",
                    "category_18",
                    "category_19",
                    "category_20",
                    "category_21",
                    "category_22",
                    "category_23",
                    "category_24",
                    "category_25",
                    "category_26",
                    "category_27",
                    "category_28",
                    "category_29",
                    "category_30",
                    "category_31",
                    "category_32",
                    "category_33",
                    "category_34",
                    "category_35",
                    "category_36",
                    "category_37",
                    "category_38",
                    "category_39",
                    "category_40",
                    "category_41",
                    "category_42",
                    "category_43",
                    "category_44",
                    "category_45",
                    "category_46",
                    "category_47",
                    "category_48",
                    "category_49",
                    "category_50",
                    "category_51",
                    "category_52",
                    "category_53",
                    "category_54",
                    "category_55",
                    "category_56",
                    "category_57",
                    "category_58",
                    "category_59",
                    "category_60",
                    "category_61",
                    "category_62",
                    "category_63",
                    "category_64",
                    "category_65",
                    "category_66",
                    "category_67",
                    "category_68",
                    "category_69",
                    "category_70",
                    "category_71",
                    "category_72",
                    "category_73",
                    "category_74",
                    "category_75",
                    "category_76",
                    "category_77",
                    "category_78",
                    "category_79",
                    "category_80",
                    "category_81",
                    "category_82",
                    "category_83",
                    "category_84",
                    "category_85",
                    "category_86",
                    "category_87",
                    "category_88",
                    "category_89",
                    "category_90",
                    "category_91",
                    "category_92",
                    "category_93",
                    "category_94",
                    "category_95",
                    "category_96",
                    "category_97",
                    "category_98",
                    "category_99",
                    "category_100",
                    "category_101",
                    "category_102",
                    "category_103",
                    "category_104",
                    "category_105",
                    "category_106",
                    "category_107",
                    "category_108",
                    "category_109",
                    "category_110",
                    "category_111",
                    "category_112",
                    "category_113",
                    "category_114",
                    "category_115",
                    "category_116",
                    "category_117",
                    "category_118",
                    "category_119",
                    "category_120",
                    "category_121",
                    "category_122",
                    "category_123",
                    "category_124",
                    "category_125",
                    "category_126",
                    "category_127",
                    "category_128",
                    "category_129",
                    "category_130",
                    "category_131",
                    "category_132",
                    "category_133",
                    "category_134",
                    "category_135",
                    "category_136",
                    "category_137",
                    "category_138",
                    "category_139",
                    "category_140",
                    "category_141",
                    "category_142",
                    "category_143",
                    "category_144",
                    "category_145",
                    "category_146",
                    "category_147",
                    "category_148",
                    "category_149",
                ]
            },
            "reason": {"type": "string", "maxLength": 280},
        },
        "required": ["label", "reason"],
        "additionalProperties": False,
    },
    "sql": {
        "type": "object",
        "properties": {
            "select": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "from": {"type": "string"},
            "where": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "col": {"type": "string"},
                        "op": {"enum": ["=", "<", ">", "<=", ">=", "!=", "LIKE", "IN"]},
                        "value": {
                            "anyOf": [
                                {"type": "string"},
                                {"type": "number"},
                                {"type": "boolean"},
                                {"type": "null"},
                                {"type": "array", "items": {"type": "string"}},
                            ]
                        },
                    },
                    "required": ["col", "op", "value"],
                    "additionalProperties": False,
                },
            },
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
        },
        "required": ["select", "from"],
        "additionalProperties": False,
    },
    "resume": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 80},
            "phone": {"type": "string", "pattern": "^\\+?[0-9 ()-]{7,20}$"},
            "email": {"type": "string", "format": "email"},
            "skills": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 50},
            "jobs": {
                "type": "array",
                "maxItems": 20,
                "items": {
                    "type": "object",
                    "properties": {
                        "company": {"type": "string"},
                        "title": {"type": "string"},
                        "from": {"type": "string", "pattern": "^\\d{4}-\\d{2}$"},
                        "to": {"anyOf": [{"type": "string", "pattern": "^\\d{4}-\\d{2}$"}, {"const": "present"}]},
                        "bullets": {"type": "array", "items": {"type": "string", "maxLength": 250}, "maxItems": 10},
                    },
                    "required": ["company", "title", "from", "to", "bullets"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["name", "phone", "email", "skills", "jobs"],
        "additionalProperties": False,
    },
    "product": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 120},
            "price": {"type": "number", "minimum": 0, "maximum": 99999.99},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 20},
            "dimensions": {
                "type": "object",
                "properties": {"w": {"type": "number"}, "h": {"type": "number"}, "d": {"type": "number"}},
                "required": ["w", "h", "d"],
                "additionalProperties": False,
            },
            "variants": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "color": {"type": "string"},
                        "size": {"enum": ["XS", "S", "M", "L", "XL"]},
                        "stock": {"type": "integer", "minimum": 0, "maximum": 100000},
                    },
                    "required": ["color", "size", "stock"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["name", "price", "tags", "dimensions", "variants"],
        "additionalProperties": False,
    },
    "geo": {
        "type": "object",
        "properties": {
            "type": {"const": "Feature"},
            "geometry": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {
                            "type": {"const": "Point"},
                            "coordinates": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
                        },
                        "required": ["type", "coordinates"],
                        "additionalProperties": False,
                    },
                    {
                        "type": "object",
                        "properties": {
                            "type": {"const": "LineString"},
                            "coordinates": {
                                "type": "array",
                                "minItems": 2,
                                "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
                            },
                        },
                        "required": ["type", "coordinates"],
                        "additionalProperties": False,
                    },
                ]
            },
            "properties": {
                "type": "object",
                "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
            },
        },
        "required": ["type", "geometry", "properties"],
        "additionalProperties": False,
    },
    "config_map": {
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "properties": {
                "url": {"type": "string", "format": "uri"},
                "timeout": {"type": "integer", "minimum": 0, "maximum": 3600},
            },
            "required": ["url"],
            "additionalProperties": False,
        },
        "minProperties": 1,
    },
    "k8s_like": {
        "type": "object",
        "properties": {
            "apiVersion": {"const": "v1"},
            "kind": {"enum": ["Pod", "Service"]},
            "metadata": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"},
                    "labels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}},
                },
                "required": ["name"],
                "additionalProperties": False,
            },
            "spec": {
                "type": "object",
                "properties": {
                    "containers": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string", "maxLength": 63},
                                "image": {"type": "string"},
                                "ports": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "properties": {
                                            "containerPort": {"type": "integer", "minimum": 1, "maximum": 65535}
                                        },
                                        "required": ["containerPort"],
                                        "additionalProperties": False,
                                    },
                                },
                            },
                            "required": ["name", "image"],
                            "additionalProperties": False,
                        },
                    }
                },
                "required": ["containers"],
                "additionalProperties": False,
            },
        },
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
    },
    "quiz": {
        "type": "object",
        "properties": {
            "questions": {
                "type": "array",
                "minItems": 5,
                "maxItems": 20,
                "items": {
                    "type": "object",
                    "properties": {
                        "q": {"type": "string", "maxLength": 300},
                        "choices": {
                            "type": "array",
                            "items": {"type": "string", "maxLength": 100},
                            "minItems": 4,
                            "maxItems": 4,
                        },
                        "answer": {"type": "integer", "minimum": 0, "maximum": 3},
                    },
                    "required": ["q", "choices", "answer"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["questions"],
        "additionalProperties": False,
    },
    "chat_title": {
        "type": "object",
        "properties": {"title": {"type": "string", "maxLength": 60}, "emoji": {"type": "string", "maxLength": 4}},
        "required": ["title", "emoji"],
        "additionalProperties": False,
    },
    "log_event": {
        "type": "object",
        "properties": {
            "ts": {"type": "string", "format": "date-time"},
            "level": {"enum": ["debug", "info", "warn", "error"]},
            "ip": {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
            "msg": {"type": "string", "pattern": "^.{0,200}$"},
            "trace": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
        },
        "required": ["ts", "level", "ip", "msg", "trace"],
        "additionalProperties": False,
    },
    "medical": {
        "type": "object",
        "properties": {
            "patient": {
                "type": "object",
                "properties": {
                    "id": {"type": "string", "pattern": "^P\\d{6}$"},
                    "dob": {"type": "string", "format": "date"},
                    "sex": {"enum": ["F", "M", "X", None]},
                },
                "required": ["id", "dob", "sex"],
                "additionalProperties": False,
            },
            "vitals": {
                "type": "object",
                "properties": {
                    "bp": {"type": "string", "pattern": "^\\d{2,3}/\\d{2,3}$"},
                    "hr": {"type": "integer", "minimum": 20, "maximum": 250},
                    "temp": {"type": "number", "minimum": 30, "maximum": 45},
                },
                "required": ["bp", "hr", "temp"],
                "additionalProperties": False,
            },
            "dx": {
                "type": "array",
                "maxItems": 25,
                "items": {
                    "type": "object",
                    "properties": {
                        "icd10": {"type": "string", "pattern": "^[A-Z][0-9]{2}(\\.[0-9A-Z]{1,4})?$"},
                        "note": {"type": "string", "maxLength": 500},
                    },
                    "required": ["icd10", "note"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["patient", "vitals", "dx"],
        "additionalProperties": False,
    },
    "plan": {
        "type": "object",
        "properties": {
            "goal": {"type": "string", "maxLength": 200},
            "tasks": {
                "type": "array",
                "minItems": 1,
                "maxItems": 30,
                "items": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "integer", "minimum": 1, "maximum": 30},
                        "title": {"type": "string", "maxLength": 100},
                        "deps": {"type": "array", "items": {"type": "integer"}, "maxItems": 10},
                        "tool": {"anyOf": [{"$ref": "#/$defs/search"}, {"$ref": "#/$defs/code"}, {"type": "null"}]},
                    },
                    "required": ["id", "title", "deps", "tool"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["goal", "tasks"],
        "additionalProperties": False,
        "$defs": {
            "search": {
                "type": "object",
                "properties": {"kind": {"const": "search"}, "query": {"type": "string", "maxLength": 200}},
                "required": ["kind", "query"],
                "additionalProperties": False,
            },
            "code": {
                "type": "object",
                "properties": {
                    "kind": {"const": "code"},
                    "lang": {"enum": ["python", "js"]},
                    "source": {"type": "string"},
                },
                "required": ["kind", "lang", "source"],
                "additionalProperties": False,
            },
        },
    },
    "pydantic_optional": {
        "title": "Movie",
        "type": "object",
        "properties": {
            "title": {"title": "Title", "type": "string"},
            "year": {
                "anyOf": [{"type": "integer", "minimum": 1888, "maximum": 2100}, {"type": "null"}],
                "default": None,
                "title": "Year",
            },
            "genres": {"items": {"$ref": "#/$defs/Genre"}, "title": "Genres", "type": "array"},
            "cast": {"additionalProperties": {"type": "string"}, "title": "Cast", "type": "object"},
        },
        "required": ["title", "genres", "cast"],
        "$defs": {"Genre": {"enum": ["action", "drama", "comedy"], "title": "Genre", "type": "string"}},
    },
    "edit_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "pattern": "^[^\\x00]{1,200}$"},
            "edits": {
                "type": "array",
                "minItems": 1,
                "maxItems": 100,
                "items": {
                    "type": "object",
                    "properties": {
                        "start_line": {"type": "integer", "minimum": 1},
                        "end_line": {"type": "integer", "minimum": 1},
                        "replacement": {"type": "string"},
                    },
                    "required": ["start_line", "end_line", "replacement"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["path", "edits"],
        "additionalProperties": False,
    },
}

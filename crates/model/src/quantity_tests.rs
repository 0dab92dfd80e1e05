//! Vectors are the answers of apimachinery 0.36.1.

use proptest::prelude::*;

use super::*;

type Vector = (&'static str, &'static str, i64, i64, Format, bool, Amount);

/// Text, canonical text, value, milli value, format, whether the text itself is kept, number.
#[rustfmt::skip]
const PARSED: &[Vector] = &[
    ("0", "0", 0, 0, Format::DecimalSI, true, Amount::Int { value: 0, scale: 0 }),
    ("00", "0", 0, 0, Format::DecimalSI, false, Amount::Int { value: 0, scale: 0 }),
    ("0.0", "0", 0, 0, Format::DecimalSI, false, Amount::Int { value: 0, scale: -1 }),
    ("+0", "0", 0, 0, Format::DecimalSI, false, Amount::Int { value: 0, scale: 0 }),
    ("-0", "0", 0, 0, Format::DecimalSI, false, Amount::Int { value: 0, scale: 0 }),
    ("1", "1", 1, 1000, Format::DecimalSI, true, Amount::Int { value: 1, scale: 0 }),
    ("-1", "-1", -1, -1000, Format::DecimalSI, true, Amount::Int { value: -1, scale: 0 }),
    ("+1", "+1", 1, 1000, Format::DecimalSI, true, Amount::Int { value: 1, scale: 0 }),
    ("1.5", "1500m", 2, 1500, Format::DecimalSI, false, Amount::Int { value: 15, scale: -1 }),
    ("0.5", "500m", 1, 500, Format::DecimalSI, false, Amount::Int { value: 5, scale: -1 }),
    (".5", "500m", 1, 500, Format::DecimalSI, false, Amount::Int { value: 5, scale: -1 }),
    ("-.5", "-500m", -1, -500, Format::DecimalSI, false, Amount::Int { value: -5, scale: -1 }),
    (".", "0", 0, 0, Format::DecimalSI, false, Amount::Int { value: 0, scale: 0 }),
    ("-", "0", 0, 0, Format::DecimalSI, false, Amount::Int { value: 0, scale: 0 }),
    ("+", "0", 0, 0, Format::DecimalSI, false, Amount::Int { value: 0, scale: 0 }),
    ("1.", "1.", 1, 1000, Format::DecimalSI, true, Amount::Int { value: 1, scale: 0 }),
    ("1.G", "1.G", 1000000000, 1000000000000, Format::DecimalSI, true, Amount::Int { value: 1, scale: 9 }),
    ("1.5Gi", "1536Mi", 1610612736, 1610612736000, Format::BinarySI, false, Amount::Dec { unscaled: 1610612736000000000, scale: 9 }),
    ("0.5Gi", "512Mi", 536870912, 536870912000, Format::BinarySI, false, Amount::Dec { unscaled: 536870912000000000, scale: 9 }),
    ("1Gi", "1Gi", 1073741824, 1073741824000, Format::BinarySI, true, Amount::Int { value: 1073741824, scale: 0 }),
    ("1024Mi", "1Gi", 1073741824, 1073741824000, Format::BinarySI, false, Amount::Int { value: 1073741824, scale: 0 }),
    ("1000Mi", "1000Mi", 1048576000, 1048576000000, Format::BinarySI, false, Amount::Int { value: 1048576000, scale: 0 }),
    ("128Mi", "128Mi", 134217728, 134217728000, Format::BinarySI, false, Amount::Int { value: 134217728, scale: 0 }),
    ("1k", "1k", 1000, 1000000, Format::DecimalSI, true, Amount::Int { value: 1, scale: 3 }),
    ("1000", "1k", 1000, 1000000, Format::DecimalSI, false, Amount::Int { value: 1000, scale: 0 }),
    ("1e3", "1e3", 1000, 1000000, Format::DecimalExponent, true, Amount::Int { value: 1, scale: 3 }),
    ("1E3", "1E3", 1000, 1000000, Format::DecimalExponent, true, Amount::Int { value: 1, scale: 3 }),
    ("1E", "1E", 1000000000000000000, 0, Format::DecimalSI, true, Amount::Int { value: 1, scale: 18 }),
    ("1e+3", "1e+3", 1000, 1000000, Format::DecimalExponent, true, Amount::Int { value: 1, scale: 3 }),
    ("1e-3", "1e-3", 1, 1, Format::DecimalExponent, true, Amount::Int { value: 1, scale: -3 }),
    ("1E-3", "1E-3", 1, 1, Format::DecimalExponent, true, Amount::Int { value: 1, scale: -3 }),
    ("1n", "1n", 1, 1, Format::DecimalSI, true, Amount::Int { value: 1, scale: -9 }),
    ("1u", "1u", 1, 1, Format::DecimalSI, true, Amount::Int { value: 1, scale: -6 }),
    ("1m", "1m", 1, 1, Format::DecimalSI, true, Amount::Int { value: 1, scale: -3 }),
    ("100m", "100m", 1, 100, Format::DecimalSI, true, Amount::Int { value: 100, scale: -3 }),
    ("0.1m", "100u", 1, 1, Format::DecimalSI, false, Amount::Int { value: 1, scale: -4 }),
    ("1500k", "1500k", 1500000, 1500000000, Format::DecimalSI, true, Amount::Int { value: 1500, scale: 3 }),
    ("2000m", "2", 2, 2000, Format::DecimalSI, false, Amount::Int { value: 2000, scale: -3 }),
    ("9223372036854775807", "9223372036854775807", 9223372036854775807, -1000, Format::DecimalSI, false, Amount::Dec { unscaled: 9223372036854775807000000000, scale: 9 }),
    ("9223372036854775808", "9223372036854775808", -9223372036854775808, 0, Format::DecimalSI, false, Amount::Dec { unscaled: 9223372036854775808000000000, scale: 9 }),
    ("-9223372036854775808", "-9223372036854775808", 0, 0, Format::DecimalSI, false, Amount::Dec { unscaled: -9223372036854775808000000000, scale: 9 }),
    ("99999999999999999999", "99999999999999999999", 7766279631452241919, 200376420520688664, Format::DecimalSI, false, Amount::Dec { unscaled: 99999999999999999999000000000, scale: 9 }),
    ("1000E", "1", 0, 0, Format::DecimalSI, false, Amount::Int { value: 1000, scale: 18 }),
    ("10Ei", "9223372036854775807", 9223372036854775807, -1000, Format::BinarySI, false, Amount::Dec { unscaled: 9223372036854775807, scale: 0 }),
    ("8Ei", "9223372036854775807", 9223372036854775807, -1000, Format::BinarySI, false, Amount::Dec { unscaled: 9223372036854775807, scale: 0 }),
    ("7Ei", "7Ei", 8070450532247928832, -9223372036854775808, Format::BinarySI, false, Amount::Dec { unscaled: 8070450532247928832000000000, scale: 9 }),
    ("100Ti", "100Ti", 109951162777600, 109951162777600000, Format::BinarySI, false, Amount::Dec { unscaled: 109951162777600000000000, scale: 9 }),
    ("8Ti", "8Ti", 8796093022208, 8796093022208000, Format::BinarySI, false, Amount::Int { value: 8796093022208, scale: 0 }),
    ("12Ki", "12Ki", 12288, 12288000, Format::BinarySI, true, Amount::Int { value: 12288, scale: 0 }),
    ("0.0000005Ki", "512u", 1, 1, Format::DecimalSI, false, Amount::Dec { unscaled: 512000, scale: 9 }),
    ("5u", "5u", 1, 1, Format::DecimalSI, true, Amount::Int { value: 5, scale: -6 }),
    ("0.1n", "1n", 1, 1, Format::DecimalSI, false, Amount::Dec { unscaled: 1, scale: 9 }),
    ("0.0000000001", "1n", 1, 1, Format::DecimalSI, false, Amount::Dec { unscaled: 1, scale: 9 }),
    ("1e100", "10e99", 0, 0, Format::DecimalExponent, false, Amount::Int { value: 1, scale: 100 }),
    ("1e-100", "1e-9", 1, 1, Format::DecimalExponent, false, Amount::Dec { unscaled: 1, scale: 9 }),
    ("1e4294967296", "1e4294967296", 1, 1000, Format::DecimalExponent, true, Amount::Int { value: 1, scale: 0 }),
    ("100E", "100E", 0, 0, Format::DecimalSI, true, Amount::Int { value: 100, scale: 18 }),
    ("-1.5Gi", "-1536Mi", -1610612736, -1610612736000, Format::BinarySI, false, Amount::Dec { unscaled: -1610612736000000000, scale: 9 }),
    ("-100m", "-100m", -1, -100, Format::DecimalSI, true, Amount::Int { value: -100, scale: -3 }),
    ("-0.0000001", "-100n", -1, -1, Format::DecimalSI, false, Amount::Int { value: -1, scale: -7 }),
    ("1023", "1023", 1023, 1023000, Format::DecimalSI, true, Amount::Int { value: 1023, scale: 0 }),
    ("1024", "1024", 1024, 1024000, Format::DecimalSI, true, Amount::Int { value: 1024, scale: 0 }),
    ("1025", "1025", 1025, 1025000, Format::DecimalSI, true, Amount::Int { value: 1025, scale: 0 }),
    ("1536", "1536", 1536, 1536000, Format::DecimalSI, true, Amount::Int { value: 1536, scale: 0 }),
    ("0.001Ki", "1024m", 2, 1024, Format::BinarySI, false, Amount::Dec { unscaled: 1024000000, scale: 9 }),
    ("3E", "3E", 3000000000000000000, 0, Format::DecimalSI, true, Amount::Int { value: 3, scale: 18 }),
    ("2P", "2P", 2000000000000000, 2000000000000000000, Format::DecimalSI, true, Amount::Int { value: 2, scale: 15 }),
    ("12345678901234567890", "12345678901234567890", -6101065172474983726, 4807115922877858896, Format::DecimalSI, false, Amount::Dec { unscaled: 12345678901234567890000000000, scale: 9 }),
    ("0.12345678912345", "123456790n", 1, 124, Format::DecimalSI, false, Amount::Dec { unscaled: 123456790, scale: 9 }),
    ("1234567.1234567891", "1234567123456790n", 1234568, 1234567124, Format::DecimalSI, false, Amount::Dec { unscaled: 1234567123456790, scale: 9 }),
    ("1.0000000001", "1000000001n", 2, 1001, Format::DecimalSI, false, Amount::Dec { unscaled: 1000000001, scale: 9 }),
    ("18446744073709551616", "18446744073709551616", 0, 0, Format::DecimalSI, false, Amount::Dec { unscaled: 18446744073709551616000000000, scale: 9 }),
    ("1Pi", "1Pi", 1125899906842624, 1125899906842624000, Format::BinarySI, false, Amount::Dec { unscaled: 1125899906842624000000000, scale: 9 }),
    ("15Pi", "15Pi", 16888498602639360, -1558245471070191616, Format::BinarySI, false, Amount::Dec { unscaled: 16888498602639360000000000, scale: 9 }),
    ("9Pi", "9Pi", 10133099161583616, -8313644912125935616, Format::BinarySI, false, Amount::Dec { unscaled: 10133099161583616000000000, scale: 9 }),
    ("1.25Ei", "1280Pi", 1441151880758558720, 2305843009213693952, Format::BinarySI, false, Amount::Dec { unscaled: 1441151880758558720000000000, scale: 9 }),
    ("0.000000000000001Ei", "1152921504607n", 1153, 1152922, Format::BinarySI, false, Amount::Dec { unscaled: 1152921504607, scale: 9 }),
    ("1e03", "1e03", 1000, 1000000, Format::DecimalExponent, true, Amount::Int { value: 1, scale: 3 }),
    ("1e0", "1e0", 1, 1000, Format::DecimalExponent, true, Amount::Int { value: 1, scale: 0 }),
    ("10e0", "10e0", 10, 10000, Format::DecimalExponent, true, Amount::Int { value: 10, scale: 0 }),
    ("100e0", "100e0", 100, 100000, Format::DecimalExponent, true, Amount::Int { value: 100, scale: 0 }),
    ("1000e0", "1e3", 1000, 1000000, Format::DecimalExponent, false, Amount::Int { value: 1000, scale: 0 }),
    ("0e5", "0", 0, 0, Format::DecimalExponent, false, Amount::Int { value: 0, scale: 5 }),
    ("0Gi", "0", 0, 0, Format::BinarySI, false, Amount::Int { value: 0, scale: 0 }),
    ("000.5", "500m", 1, 500, Format::DecimalSI, false, Amount::Int { value: 5, scale: -1 }),
    ("007", "007", 7, 7000, Format::DecimalSI, true, Amount::Int { value: 7, scale: 0 }),
    ("0100Mi", "0100Mi", 104857600, 104857600000, Format::BinarySI, true, Amount::Int { value: 104857600, scale: 0 }),
    ("1.10", "1100m", 2, 1100, Format::DecimalSI, false, Amount::Int { value: 110, scale: -2 }),
    ("1.100", "1.100", 2, 1100, Format::DecimalSI, true, Amount::Int { value: 1100, scale: -3 }),
    ("1.000", "1", 1, 1000, Format::DecimalSI, false, Amount::Int { value: 1000, scale: -3 }),
    ("123456789012345678901234567890", "123456789012345678901234567890", -4362896299872285998, 8982045596877734992, Format::DecimalSI, false, Amount::Dec { unscaled: 123456789012345678901234567890000000000, scale: 9 }),
    ("0.9999999999Gi", "1073741823892625818n", 1073741824, 1073741823893, Format::BinarySI, false, Amount::Dec { unscaled: 1073741823892625818, scale: 9 }),
    ("1e-9", "1e-9", 1, 1, Format::DecimalExponent, true, Amount::Int { value: 1, scale: -9 }),
    ("1e-10", "1e-9", 1, 1, Format::DecimalExponent, false, Amount::Dec { unscaled: 1, scale: 9 }),
    ("5e-10", "1e-9", 1, 1, Format::DecimalExponent, false, Amount::Dec { unscaled: 1, scale: 9 }),
    ("-5e-10", "-1e-9", 1, 1, Format::DecimalExponent, false, Amount::Dec { unscaled: -1, scale: 9 }),
    ("1.5e-9", "2e-9", 1, 1, Format::DecimalExponent, false, Amount::Dec { unscaled: 2, scale: 9 }),
    ("1e19", "10e18", 0, 0, Format::DecimalExponent, false, Amount::Int { value: 1, scale: 19 }),
    ("1e18", "1e18", 1000000000000000000, 0, Format::DecimalExponent, true, Amount::Int { value: 1, scale: 18 }),
    ("1E18", "1E18", 1000000000000000000, 0, Format::DecimalExponent, true, Amount::Int { value: 1, scale: 18 }),
    ("E", "0", 0, 0, Format::DecimalSI, false, Amount::Int { value: 0, scale: 18 }),
    ("Ki", "0", 0, 0, Format::BinarySI, false, Amount::Int { value: 0, scale: 0 }),
    ("e3", "0", 0, 0, Format::DecimalExponent, false, Amount::Int { value: 0, scale: 3 }),
    ("+5", "+5", 5, 5000, Format::DecimalSI, true, Amount::Int { value: 5, scale: 0 }),
    ("12e6", "12e6", 12000000, 12000000000, Format::DecimalExponent, true, Amount::Int { value: 12, scale: 6 }),
    ("1200e4", "12e6", 12000000, 12000000000, Format::DecimalExponent, false, Amount::Int { value: 1200, scale: 4 }),
    ("1", "1", 1, 1000, Format::DecimalSI, true, Amount::Int { value: 1, scale: 0 }),
];

#[rustfmt::skip]
const REFUSED: &[(&str, QuantityError)] = &[
    ("1ee3", QuantityError::Suffix),
    ("1i", QuantityError::Suffix),
    ("1Ki3", QuantityError::Suffix),
    ("1e", QuantityError::Suffix),
    ("1Kii", QuantityError::Suffix),
    ("abc", QuantityError::Format),
    ("1.2.3", QuantityError::Format),
    ("1Gb", QuantityError::Format),
    ("1KiB", QuantityError::Format),
    ("1e3.5", QuantityError::Format),
    ("0x10", QuantityError::Format),
    ("1_000", QuantityError::Format),
    ("1,5", QuantityError::Format),
    ("1M5", QuantityError::Suffix),
    ("1m3", QuantityError::Suffix),
    ("Ei", QuantityError::Numeric),
    ("--5", QuantityError::Suffix),
    ("+-5", QuantityError::Suffix),
    ("1+5", QuantityError::Suffix),
    ("1-5", QuantityError::Suffix),
    ("1M+5", QuantityError::Suffix),
];

/// Two quantities, their order, sum and difference.
#[rustfmt::skip]
const PAIRS: &[(&str, &str, i32, &str, &str)] = &[
    ("17094.960437e5", "-564.3141Gi", 1, "-604218154999218400e-6", "607637147086618400e-6"),
    ("30398M", "-76000Ti", 1, "-83562853312976k", "83562914108976k"),
    ("46.4P", "49000e-3", 1, "46400000000000049", "46399999999999951"),
    ("73000G", "5256537413032848682u", 1, "78256537413032848682u", "67743462586967151318u"),
    ("21220991440923Gi", "5147997304695484899e5", -1, "514808953841585344675807", "-514790507097511635124193"),
    ("34520.706Mi", "82000e5", 1, "44397583814656m", "27997583814656m"),
    ("755301.4933e-3", "81000Pi", -1, "9223372036854776562301493300e-9", "-9223372036854775051698506700e-9"),
    ("667234237495Mi", "4892.6878195431Ki", 1, "699645807820567232327212135n", "699645807810547007672787865n"),
    ("971.707712u", "89086511797e3", -1, "89086511797000000971708n", "-89086511796999999028292n"),
    ("9644135.884e5", "4783.852402749Ti", -1, "5260865755975081727156224e-9", "-5258936928798281727156224e-9"),
    ("-61000e-3", "36000T", -1, "35999999999999939", "-36000000000000061"),
    ("878Ti", "242473199246419635e3", -1, "242474164617628822328", "-242472233875210447672"),
    ("-32000n", "8.21", -1, "8209968u", "-8210032u"),
    ("-79000n", "32585141744986Ei", -1, "9223372036854775806999921u", "-9223372036854775807000079u"),
    ("91u", "710326589786Ti", -1, "9223372036854775807000091u", "-9223372036854775806999909u"),
    ("2090Mi", "9081904.728791Mi", -1, "9525258856736751616u", "-9520875809056751616u"),
    ("7575305755588824E2", "3677.2187176e-3", 1, "757530575558882403677218718e-9", "757530575558882396322781282e-9"),
    ("13000E2", "-935735071999455423n", 1, "-934435071999455423e-9", "937035071999455423e-9"),
    ("6.839", "98000m", -1, "104839m", "-91161m"),
    ("-53000k", "7.93769733k", -1, "-52992062302670u", "-53007937697330u"),
    ("74000Ei", "30000G", 1, "9223402036854775807", "9223342036854775807"),
    ("23000P", "11000m", 1, "23000000000000000011", "22999999999999999989"),
    ("57000", "-5Gi", 1, "-5368652120", "5368766120"),
    ("122.9993Pi", "-8.711383E", 1, "-8572898099588292037836800u", "8849867900411707962163200u"),
    ("-115068483e3", "82000M", -1, "-33068483e3", "-197068483e3"),
    ("-42000e-3", "2780934660M", -1, "2780934659999958", "-2780934660000042"),
    ("-410888.104705n", "89000Ki", -1, "91135999999589111n", "-91136000000410889n"),
    ("9523867637257E2", "-1846Gi", 1, "950404636318596", "954368891132804"),
    ("69000E2", "-211892Ti", 1, "-232977717825812192", "232977717839612192"),
    ("-40580.92466687473", "-67000G", 1, "-67000000040580924666875n", "66999999959419075333125n"),
    ("4.994336443E2", "3831327145e5", -1, "383132714500499433644300e-9", "-383132714499500566355700e-9"),
    ("7.20293857Mi", "10553G", -1, "10553007552828513976320n", "-10552992447171486023680n"),
    ("68256568980896Gi", "-9681578131682290Pi", 1, "0", "18446744073709551614"),
    ("610.48094e5", "58000M", -1, "58061048094", "-57938951906"),
    ("21000k", "-9972Pi", 1, "-9223372036833775807", "9223372036875775807"),
    ("-6046210038Ei", "3e5", -1, "-9223372036854475807", "-9223372036855075807"),
    ("9.4Ei", "30.659663n", 1, "9223372036854775807000000031n", "9223372036854775806999999969n"),
    ("3000", "83000G", -1, "83000000003k", "-82999999997k"),
    ("-616304865951555m", "-94000e-3", -1, "-616304866045555m", "-616304865857555m"),
    ("-820.7355944Mi", "881467981M", -1, "881467120396353366425600n", "-881468841603646633574400n"),
    ("76000e5", "-57m", 1, "7599999999943e-3", "7600000000057e-3"),
    ("41098088960k", "-76750e3", 1, "41098012210k", "41098165710k"),
    ("14000m", "28000Ei", -1, "9223372036854775821", "-9223372036854775793"),
    ("-467241.37G", "8833Mi", -1, "-467232107928192", "-467250632071808"),
    ("-1200024.736958886u", "-858.5u", -1, "-1200883237n", "-1199166237n"),
    ("-94000e-3", "6828013.78862563M", -1, "6828013788531630e-3", "-6828013788719630e-3"),
    ("-463n", "503.631239E", -1, "503631238999999999999999999537n", "-503631239000000000000000000463n"),
    ("13547Ei", "-6250867.441e3", 1, "9223372030603908366", "9223372043105643248"),
    ("4838595.3855E", "69735219M", 1, "4838595385569735219M", "4838595385430264781M"),
    ("46000Ei", "6000Pi", 1, "15978771477910519807", "2467972595799031807"),
    ("841091.56132353n", "2.9172613178e-3", -1, "3758354n", "-2076170n"),
    ("62000Pi", "66000E", -1, "66009223372036854775807", "-65990776627963145224193"),
    ("-146346.109056424Pi", "19000k", -1, "-9223372036835775807", "-9223372036873775807"),
    ("3776.78584882Ki", "55000Mi", -1, "57675547428709191680n", "-57667812571290808320n"),
    ("-65Gi", "4.332812n", -1, "-69793218559999999995n", "-69793218560000000005n"),
    ("54704e3", "-2025P", 1, "-2024999999945296e3", "2025000000054704e3"),
    ("-4825393445357282M", "50000k", -1, "-4825393445357232M", "-4825393445357332M"),
];

fn q(text: &str) -> Quantity {
    Quantity::parse(text).unwrap()
}

#[test]
fn parses_as_the_api_machinery_does() {
    for (text, canonical, value, milli, format, kept, amount) in PARSED {
        let got = q(text);
        assert_eq!(got.amount(), *amount, "{text}");
        assert_eq!(got.format(), *format, "{text}");
        assert_eq!(got.source_text(), if *kept { *text } else { "" }, "{text}");
        assert_eq!(got.to_string(), *canonical, "{text}");
        assert_eq!(got.value(), *value, "{text}");
        assert_eq!(got.milli_value(), *milli, "{text}");
    }
}

#[test]
fn refuses_what_the_api_machinery_refuses() {
    for (text, error) in REFUSED {
        assert_eq!(Quantity::parse(text).unwrap_err(), *error, "{text}");
    }
    assert_eq!(Quantity::parse("").unwrap_err(), QuantityError::Format);
    assert_eq!(
        QuantityError::Format.to_string(),
        "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
    );
}

#[test]
fn arithmetic_as_the_api_machinery_does() {
    for (a, b, order, sum, difference) in PAIRS {
        assert_eq!(q(a).cmp(&q(b)) as i32, *order, "{a} {b}");
        let mut got = q(a);
        got.add(&q(b));
        assert_eq!(got.to_string(), *sum, "{a} + {b}");
        let mut got = q(a);
        got.sub(&q(b));
        assert_eq!(got.to_string(), *difference, "{a} - {b}");
    }
}

#[test]
fn more_digits_than_fit_are_an_error() {
    assert_eq!(Quantity::parse(&"9".repeat(60)).unwrap_err(), QuantityError::Numeric);
    assert_eq!(Quantity::parse(&"9".repeat(100_000)).unwrap_err(), QuantityError::Numeric);
    assert_eq!(q(&format!("0.{}", "1".repeat(100_000))).to_string(), "111111112n");
    assert_eq!(q(&format!("{}1", "0".repeat(100_000))).value(), 1);
}

#[test]
fn rounds_up_to_thousandths() {
    for (text, want, exact) in
        [("0.0005", "1m", false), ("1500u", "2m", false), ("1", "1", true), ("1.5Gi", "1536Mi", true)]
    {
        let mut got = q(text);
        assert_eq!(got.round_up(MILLI), exact, "{text}");
        assert_eq!(got.to_string(), want, "{text}");
    }
}

#[test]
fn multiplies() {
    let mut got = q("250m");
    got.mul(6);
    assert_eq!(got.to_string(), "1500m");
    let mut got = q("9223372036854775807");
    got.mul(10);
    assert_eq!(got.to_string(), "92233720368547758070");
}

#[test]
fn lists() {
    let list = |pairs: &[(&str, &str)]| -> BTreeMap<String, api::Quantity> {
        pairs.iter().map(|(k, v)| ((*k).to_string(), api::Quantity((*v).to_string()))).collect()
    };
    let l = list(&[("cpu", "0.1001"), ("memory", "1.5Ki"), ("x", "junk")]);
    assert_eq!(cpu_milli(&l), Some(101));
    assert_eq!(bytes(&l, "memory"), Some(1536));
    assert_eq!(bytes(&l, "x"), None);
    assert_eq!(bytes(&l, "absent"), None);
}

fn text() -> impl Strategy<Value = String> {
    (any::<bool>(), 0u64..100_000_000, proptest::option::of(0u32..1_000_000), 0..SUFFIXES.len()).prop_map(
        |(neg, n, d, s)| {
            let d = d.map(|d| format!(".{d}")).unwrap_or_default();
            format!("{}{n}{d}{}", if neg { "-" } else { "" }, SUFFIXES[s].0)
        },
    )
}

proptest! {
    #[test]
    fn any_text_is_safe(s in "\\PC*", t in "[+-]?[0-9.]{0,50}[eEinumkKMGTP]{0,3}[-+]?[0-9]{0,12}") {
        for s in [s, t] {
            if let Ok(q) = Quantity::parse(&s) {
                let _ = (q.to_string(), q.value(), q.milli_value());
            }
        }
    }

    #[test]
    fn canonical_text_round_trips(s in text()) {
        let a = q(&s);
        // Exponents beyond the last suffix are the one case that the canonical text does not carry.
        prop_assume!(compare(a.decimal().0.saturating_abs(), a.decimal().1, 1, 21).is_lt());
        let mut plain = a.clone();
        plain.text.clear();
        prop_assert_eq!(&q(&plain.to_string()), &a);
        prop_assert_eq!(q(&plain.to_string()).to_string(), plain.to_string());
    }

    #[test]
    fn order_is_total_and_agrees_with_subtraction(s in text(), t in text()) {
        let (a, b) = (q(&s), q(&t));
        prop_assert_eq!(a.cmp(&b), b.cmp(&a).reverse());
        let mut d = a.clone();
        d.sub(&b);
        prop_assert_eq!(d.sign(), a.cmp(&b) as i32);
    }

    #[test]
    fn addition_is_associative_and_commutative(s in text(), t in text(), u in text()) {
        let sum = |parts: [&str; 3]| {
            let mut total = q(parts[0]);
            total.add(&q(parts[1]));
            total.add(&q(parts[2]));
            total
        };
        prop_assert_eq!(sum([&s, &t, &u]), sum([&u, &s, &t]));
        prop_assert_eq!(sum([&s, &t, &u]), sum([&t, &u, &s]));
    }

    #[test]
    fn rounding_never_makes_smaller(s in text()) {
        let a = q(&s);
        let mut b = a.clone();
        b.round_up(MILLI);
        let grew = if a.sign() < 0 { b <= a } else { b >= a };
        prop_assert!(grew);
    }
}

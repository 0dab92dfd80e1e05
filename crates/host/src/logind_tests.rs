//! Against a stand-in for logind and systemd on a bus of its own. Without `dbus-daemon` on this host there is nothing to test against.

use fake_logind::{Bus, FakeLogind};

use super::*;

#[tokio::test]
async fn a_shutdown_is_held_up_and_told() {
    let Some(bus) = Bus::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let drop_ins = dir.path().join("logind.conf.d");
    let fake = FakeLogind::on(&bus, 5, &drop_ins.join(DROP_IN)).await;

    let logind = Logind::connect(Some(bus.address())).await.unwrap().with_drop_ins(drop_ins.clone());
    assert_eq!(logind.max_delay().await.unwrap(), Duration::from_secs(5));
    assert!(!logind.is_shutting_down().await.unwrap());
    logind.set_max_delay(Duration::from_secs(30)).await.unwrap();
    assert_eq!(
        std::fs::read_to_string(drop_ins.join("99-kubelet.conf")).unwrap(),
        "# Kubelet logind override\n[Login]\nInhibitDelayMaxSec=30\n"
    );
    assert_eq!(logind.max_delay().await.unwrap(), Duration::from_secs(30));

    let mut events = logind.shutdowns().await.unwrap();
    let lock = logind.inhibit().await.unwrap();
    assert_eq!(fake.asked(), ["systemd-logind.service all 1", "shutdown kubelet delay"]);
    assert_eq!(fake.held(), 1);
    for start in [true, false, true] {
        fake.shut_down(start).await;
        assert_eq!(events.next().await, Some(start));
        assert_eq!(logind.is_shutting_down().await.unwrap(), start);
    }
    drop(lock);
    assert_eq!(fake.held(), 0);
    // Another logind knows nothing of our locks.
    fake.leave().await;
    assert_eq!(events.next().await, None);
}

#[tokio::test]
async fn without_a_bus_it_says_what_was_attempted() {
    let error = Logind::connect(Some("unix:path=/nonexistent/bus")).await.unwrap_err();
    assert!(error.full().starts_with("connect to the system bus: "), "{}", error.full());
    let Some(bus) = Bus::start() else { return };
    let logind = Logind::connect(Some(bus.address())).await.unwrap();
    let error = logind.inhibit().await.unwrap_err();
    assert!(error.full().starts_with("take an inhibitor lock from logind: "), "{}", error.full());
}
